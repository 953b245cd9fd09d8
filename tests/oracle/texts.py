"""Compare the replies to wrong command lines and wrong library calls.

Not their wording: the exit code or exception, one line a fault without a traceback, the key at
fault, the nearest choice, and that nothing is trained.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.oracle.side import SIDES, End, Job, report, run_both

WRONG_INPUT = 2
MAX_NEAREST = 3
"""Choices among which the nearest may stand at any place."""
THEIRS = "def halve(grad):\n    return grad / 2\n"


@dataclass(frozen=True)
class Wrong:
    """A wrong command line, or library call with `call`, and the words that its reply must have.

    `nearest` must stand apart from a long list of choices, `listed` somewhere.
    """

    given: str
    key: str
    nearest: str = ""
    listed: str = ""
    lines: int = 1
    call: bool = False

    @property
    def job_words(self) -> list[str]:
        """The words with short defaults for the keys that they lack."""
        words = self.given.split()
        keys = {word.partition("=")[0] for word in words}
        defaults = ["steps=4", "seeds=1", "logger=none", "report=false"]
        if "--list" in words:
            return words
        return words + [word for word in defaults if word.partition("=")[0] not in keys]


TWO_LOSSES = "task=overlay task.num_train=64 model=multi_head"
COMMANDS = [
    Wrong("transform=clpi", "transform", "clip"),
    Wrong("transform=[sign,clpi]", "transform", "clip"),
    Wrong("-m transform=clip,clop", "transform", "clip"),
    Wrong("-m transform=glob(zz*)", "transform=glob(zz*)", listed="clip"),
    Wrong("transform=clip,sign", "transform=clip,sign", listed="-m"),
    Wrong("transform=[clip,clip]", "transform", "clip"),
    Wrong("transform=theirs.halv", "transform.halv", "halve"),
    Wrong("transform=thiers.halve", "thiers"),
    Wrong("transform=gradsurg.transforms.clip.Clop", "transform.clop", "Clip"),
    Wrong("transfrom=clip", "transfrom", "transform"),
    Wrong("transform=clip stpes=5", "stpes", "steps"),
    Wrong("transform=clip transform.value=1", "transform.value", "transform.clip.value"),
    Wrong("transform=clip transform.clip.valeu=1", "transform.clip.valeu", "value"),
    Wrong("transform=clip transform.clip.value=-1", "transform.clip.value", listed="-1"),
    Wrong("transform=clip transform.clip.value=big", "transform.clip.value", listed="big"),
    Wrong("transform=clip steps=many lr=-1 batch_size=0", "lr", listed="many", lines=3),
    Wrong("transform=clip seeds=3 seeds=4", "seeds", listed="seeds=4"),
    Wrong("transform=clip --seeds 3", "--seeds", "seeds=3"),
    Wrong("transform=clip --multirunn", "--multirunn", "--multirun"),
    Wrong("clip", "clip", listed="="),
    Wrong("--list transfrom", "transfrom", "transform"),
    Wrong("--config-dir confs transform=clip", "--config-dir", listed="confs"),
    Wrong("transform=clip hydra/launcher=jobli", "hydra/launcher", "joblib"),
    Wrong("experiment=simple_transform", "experiment", "simple_transforms"),
    Wrong("transform=clip site=relu_node", "site", "relu_nodes"),
    Wrong("transform=clip site.pattern=hiden.*", "site.pattern", "hidden.*"),
    Wrong("transform=clip site=outputs site.pattern=ouput", "site.pattern", "output"),
    Wrong("transform=clip site.stage=acumulated", "site.stage", listed="accumulated"),
    Wrong("transform=clip when=warmpu", "when", "warmup"),
    Wrong("transform=clip when=thrshold", "when", "threshold"),
    Wrong("transform=clip when.strat=1", "when.strat", "start"),
    Wrong("transform=clip when.start=50", "when.start", listed="50"),
    Wrong("aggregator=pcgrad", "aggregator", listed="overlay"),
    Wrong(f"aggregator=pcgrda {TWO_LOSSES}", "aggregator", "pcgrad"),
    Wrong(
        f"aggregator=pcgrad aggregator.reduction=men {TWO_LOSSES}",
        "aggregator.reduction",
        listed="mean",
    ),
    Wrong(f"aggregator=pcgrad shared.patern=x {TWO_LOSSES}", "shared.patern", "pattern"),
    Wrong(f"aggregator=pcgrad shared.pattern=trnk.* {TWO_LOSSES}", "shared.pattern", "trunk.*"),
    Wrong("transform=clip model.hiden=[3]", "model.hiden", "hidden"),
    Wrong("transform=clip model.hidden=[true]", "model.hidden", listed="True"),
    Wrong("transform=clip task=digist", "task", "digits"),
    Wrong("transform=clip optimizer=adam optimizer.betas=[0.9,2]", "optimizer", listed="2"),
    Wrong("transform=clip optimizer.momentun=0.9", "optimizer.momentun", "momentum"),
    Wrong("transform=clip schedule=cosin", "schedule", "cosine"),
    Wrong("transform=clip logger=wandbb", "logger", "wandb"),
    Wrong("transform=clip control=norm_match", "control", listed="norm_matched"),
    Wrong("transform=clip until=accuracy eval_every=1", "until", listed=">="),
    Wrong("transform=clip tune=optimizer.lrr=[0.1,1]", "optimizer.lrr", "lr"),
    Wrong("transform=clip metric=test/acuracy", "metric", "test/accuracy"),
    Wrong("transform=clip eval_every=3 log_every=2", "eval_every", listed="log_every=2"),
    Wrong("transform=clip device=cuda:9", "device", listed="cuda:9"),
]

TWO = "nn.Sequential(nn.Linear(2, 2), nn.ReLU())"
CALLS = [
    Wrong(given, key, nearest, listed, call=True)
    for given, key, nearest, listed in [
        ("gs.Clip(-1)", "value", "", "-1"),
        ("gs.Clip(valu=1)", "valu", "value", ""),
        ("gs.Clip('a')", "value", "", "'a'"),
        ("gs.Cilp(1)", "Cilp", "Clip", ""),
        ("gs.Clamp(low=3, high=1)", "low", "high", "3"),
        ("gs.Steps(start=5, stop=2)", "stop", "start", "5"),
        ("gs.Threshold(above=1, measure='norn')", "measure", "", "norm"),
        ("gs.PCGrad(reduction='men')", "reduction", "", "mean"),
        ("gs.Parameters(stage='acumulated')", "stage", "", "accumulated"),
        ("gs.load('nope.yaml')", "nope.yaml", "", ""),
        ("gs.list('transfrom')", "transfrom", "transform", ""),
        ("gs.load_study('nowhere')", "nowhere", "", ""),
        ("gs.Surgery(gs.Clip(1))", "Surgery", "", "Intervention"),
        ("gs.Intervention(gs.Clip(1), at='weight')", "at", "Parameters", "weight"),
        ("gs.Intervention(gs.Clip)", "transform", "Clip()", ""),
        ("gs.PerSample(3)", "of", "", "3"),
        (f"gs.Surgery(gs.Intervention(gs.Clip(1))).attach({TWO!r})", "model", "", "Module"),
        (
            f"gs.Surgery(gs.Intervention(gs.Clip(1), gs.Parameters('0.wieght'))).attach({TWO})",
            "pattern",
            "0.weight",
            "",
        ),
        (
            f"gs.Surgery(gs.Intervention(gs.Clip(1), gs.Updates())).attach({TWO})",
            "optimizer",
            "attach(model, optimizer)",
            "",
        ),
    ]
]


def main(reference: Path) -> int:
    """Give all to both trees; the working tree must be no worse than the reference."""
    every = [*COMMANDS, *CALLS]
    found: list[str] = []
    known: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = [_job(number, wrong, folder) for number, wrong in enumerate(every)]
        ends = run_both(reference, jobs, folder)
        for number, wrong in enumerate(every):
            old, new = (ends[side][number] for side in SIDES)
            kinds = {_kind(wrong, end) for end in (old, new)}
            if len(kinds) > 1:
                found.append(f"{wrong.given}: {_kind(wrong, new)}, reference {_kind(wrong, old)}")
            elif not wrong.call and old.code != WRONG_INPUT:
                known.append(f"{wrong.given}: exit code {old.code}")
            old_faults, new_faults = (
                set(_faults(wrong, ends[side][number], folder / side / str(number)))
                for side in SIDES
            )
            known += [f"{wrong.given}: {fault}" for fault in sorted(old_faults)]
            found += [f"{wrong.given}: {fault}" for fault in sorted(new_faults - old_faults)]
    print(f"texts: {len(COMMANDS)} wrong command lines and {len(CALLS)} wrong calls compared")
    for line in known:
        print(f"texts, also in the reference: {line}")
    return report("texts", found)


def _job(number: int, wrong: Wrong, folder: Path) -> Job:
    """Write the user's module into the folders of a job."""
    for side in SIDES:
        place = folder / side / str(number)
        place.mkdir(parents=True)
        (place / "theirs.py").write_text(THEIRS, encoding="utf-8")
    if wrong.call:
        return Job(str(number), call=wrong.given)
    return Job(str(number), wrong.job_words)


def _kind(wrong: Wrong, end: End) -> str:
    """The exit code, or the type of a call's exception."""
    return end.out.strip() or "no exception" if wrong.call else f"exit code {end.code}"


def _faults(wrong: Wrong, end: End, folder: Path) -> Iterator[str]:
    """Yield what is wrong with a reply."""
    reply = "\n".join(end.lines)
    if "Traceback" in end.err:
        yield "a traceback"
    elif len(end.lines) != wrong.lines:
        yield f"{len(end.lines)} lines for {wrong.lines}"
    if not _has(reply, wrong.key):
        yield f"the key {wrong.key} is not named"
    if wrong.nearest and not _names_apart(reply, wrong.nearest):
        yield f"the nearest choice {wrong.nearest} is not named"
    if wrong.listed and wrong.listed not in reply:
        yield f"{wrong.listed} is not named"
    if [*folder.rglob("summary.json")]:
        yield "a run was trained"


def _has(text: str, word: str) -> bool:
    """Whether a text has a word that is no part of another."""
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def _names_apart(reply: str, choice: str) -> bool:
    """Whether a choice is named first, or among few, and not only within a long list."""
    for part in re.split(r"[.:?;] |\n", reply):
        items = part.split(", ")
        if _has(items[0], choice) or (len(items) <= MAX_NEAREST and _has(part, choice)):
            return True
    return False
