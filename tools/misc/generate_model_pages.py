"""Write the tables of models in the README of each family of configs from its metafile.yml.

usage: python tools/misc/generate_model_pages.py [--check]

A README holds its prose by hand and marks each table by ``<!-- models: DATASET -->`` and ``<!-- /models -->``. A row is
a conditioned config, or one without a conditioned twin. Figures under ``Metadata: Published`` are those of others, each
with its source; ``Results`` are this project's own.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- models: (?P<dataset>[^>]+?) -->\n).*?(<!-- /models -->)", re.DOTALL)
METRICS = {
    "ImageNet-1k": ("top-1", ("Top 1 Accuracy",)),
    "COCO": ("box / mask AP", ("box AP", "mask AP")),
}
PAPER = "paper"
AUTHORS = "authors"
NOT_TRAINED = "not trained"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the tables of models in the READMEs of configs/")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    return parser.parse_args()


def read_metafiles(root: Path) -> list[dict]:
    """Return the metafiles that configs/model-index.yml imports."""
    index = yaml.safe_load((root / "configs" / "model-index.yml").read_text())
    return [yaml.safe_load((root / name).read_text()) for name in index["Import"]]


def pages(root: Path) -> dict[Path, str]:
    """Return the text that each README with tables should have."""
    found = {}
    for metafile in read_metafiles(root):
        for collection in metafile["Collections"]:
            models = [model for model in metafile["Models"] if model["In Collection"] == collection["Name"]]
            path = root / collection["README"]
            text = path.read_text()
            if BLOCK.search(text):
                found[path] = BLOCK.sub(lambda block, models=models: _fill(block, models), text)
    return found


def table(models: list[dict], dataset: str) -> str:
    """Return the table of the models trained on ``dataset``, in the metafile's order.

    Raises:
        ValueError: No model is trained on ``dataset``, or its metrics are not known here.
    """
    if dataset not in METRICS:
        raise ValueError(f"no metrics known for {dataset!r}: add them to METRICS; known are {', '.join(METRICS)}.")
    here = {model["Name"]: model for model in models if model["Metadata"]["Training Data"] == dataset}
    if not here:
        raise ValueError(f"no model of the metafile has Training Data: {dataset}.")
    metric, keys = METRICS[dataset]
    lines = [
        f"| config | parameters | stock, published: {metric} | stock, the paper | conditioned, the paper | here |",
        "|---|---|---|---|---|---|",
    ]
    twins = {_twin(name) for name in here if name != _twin(name)}
    for name, model in here.items():
        if name in twins:
            continue  # its figures stand in the row of the conditioned config
        stock = here.get(_twin(name), model)
        cells = [
            f"[`{name}`]({Path(model['Config']).name})",
            f"{model['Metadata']['Parameters'] / 1e6:.1f} M",
            _published(stock, keys, lambda by: by != PAPER) or "not published",
            _published(stock, keys, lambda by: by == PAPER) or "-",
            _published(model, keys, lambda by: by == PAPER) or "-",
            ", ".join(_figures(result["Metrics"], keys) for result in model.get("Results", [])) or NOT_TRAINED,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _fill(block: re.Match, models: list[dict]) -> str:
    return f"{block[1]}{table(models, block['dataset'])}\n{block[3]}"


def _twin(name: str) -> str:
    return name.replace("spectral-", "")


def _published(model: dict, keys: tuple[str, ...], wanted: Callable[[str], bool]) -> str:
    entries = [entry for entry in model["Metadata"].get("Published", []) if wanted(entry["By"])]
    return ", ".join(
        _figures(entry, keys) + (f" ({entry['By']})" if entry["By"] not in (PAPER, AUTHORS) else "")
        for entry in entries
    )


def _figures(metrics: dict, keys: tuple[str, ...]) -> str:
    return " / ".join(f"{metrics[key]}" for key in keys)


def main() -> None:
    args = parse_args()
    stale = {path: text for path, text in pages(ROOT).items() if path.read_text() != text}
    for path, text in stale.items():
        if not args.check:
            path.write_text(text)
        print(f"{'out of date' if args.check else 'written'}: {path.relative_to(ROOT)}")
    if args.check and stale:
        sys.exit("Run python tools/misc/generate_model_pages.py.")


if __name__ == "__main__":
    main()
