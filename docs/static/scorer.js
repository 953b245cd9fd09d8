// The scores of Sphinx's search, with pages that answer a question before those that mention it.
var Scorer = {
  score: ([page, , , , score]) => score + (page.startsWith("how/") ? 5 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
