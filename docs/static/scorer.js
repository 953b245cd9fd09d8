// The scores of Sphinx's search: pages that answer a question come before pages that mention its words.
var Scorer = {
  score: ([page, , , , score]) =>
    score +
    (/^how\/|^(faq|own_code|per_example|studies|sweeps|trainers)$/.test(page) ? 5 : 0) +
    (/^pages\/api\//.test(page) ? 2 : 0) -
    (/^pages\/(changelog|hooks_tour|.*20)/.test(page) ? 3 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
