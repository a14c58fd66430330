"""punar beside its peers: time at each one's memory, memory at each one's time, on eight models.

    python benchmarks/peers.py --model gpt --rounds 7 --out results/
    python benchmarks/peers.py --all --out results/

Peers: ``torch.utils.checkpoint`` on every block, every 2nd, 3rd and 4th; ``checkpoint_sequential``; selective checkpointing with the usual lists
of operators; torch_remat and fairscale where they are installed; punar's own ``rotor``; with ``--compile`` also ``torch.compile`` under
``activation_memory_budget``. The rules of measuring are at the top of ``peers/measure.py``. Each model runs in a process of its own, with an
allocator preloaded that counts (built with gcc). ``--all`` takes up where it stopped: models whose file is there with the same settings
are not measured again.

Writes MODEL.json and MODEL.png, then summary.json, summary.md and summary.png of the models asked for. Prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.figure import draw
from peers.memory import preloaded
from peers.models import COMPARED, MODELS
from peers.summary import as_markdown, sentence, summarise

SETTINGS = ("scale", "rounds", "threads", "only")


def main() -> None:
    options = parse_options()
    if options.worker:
        work(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    names = COMPARED if options.all else options.model.split(",")
    results = [measured for name in names if (measured := measure(name, options)) is not None]
    if not results:
        raise SystemExit("asked to compare, found no model that could be measured: see the errors above")
    summary = summarise(results)
    write_json(options.out / "summary.json", summary)
    page = as_markdown(results, summary)
    (options.out / "summary.md").write_text(page, encoding="utf-8")
    draw(results, options.out / "summary.png")
    print(page)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", help=f"one or more of {', '.join(MODELS)}, with commas")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(COMPARED)}")
    parser.add_argument("--rounds", type=int, default=7, help="how often each run takes its turn")
    parser.add_argument(
        "--minutes", type=float, default=60, help="a model's process begins no further round after so long; three it measures"
    )
    parser.add_argument("--scale", type=float, default=0.5, help="batch, in parts of that which makes a step of about two seconds")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    parser.add_argument("--compile", action="store_true", help="compare with torch.compile's budgets too, which takes minutes more a model")
    parser.add_argument(
        "--only", default="", help="peers whose names begin with one of these, with commas: checkpoint,selective,torch_remat"
    )
    parser.add_argument("--again", action="store_true", help="measure also what was measured with the same settings")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what is written")
    parser.add_argument("--worker", choices=("eager", "compiled"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.model.split(",")) - MODELS.keys()
    if unknown:
        parser.error(f"asked for the model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if options.rounds < 1 or options.scale <= 0 or options.threads < 1:
        parser.error(f"asked for {options.rounds} rounds at scale {options.scale} on {options.threads} threads; each must be positive")
    return options


# -- the parent ----------------------------------------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """One model, from its file where that has the same settings; None where its process failed."""
    if options.compile and not is_current(options.out / f"{name}.compile.json", options):
        run_worker("compiled", name, options)
    path = options.out / f"{name}.json"
    if not is_current(path, options) and not run_worker("eager", name, options):
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    draw([result], path.with_suffix(".png"))
    print(sentence(summarise([result])["eager"], name), file=sys.stderr)
    return result


def is_current(path: Path, options: argparse.Namespace) -> bool:
    """Whether a file has what these options would measure."""
    if options.again or not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    has_compiled = any(point.get("family") == "compile" for point in found["points"])
    wants_compiled = options.compile and "runs" in found and is_current(path.with_suffix(".compile.json"), options)
    return all(found[key] == getattr(options, key) for key in SETTINGS) and (has_compiled or not wants_compiled)


def run_worker(kind: str, name: str, options: argparse.Namespace) -> bool:
    """Measures in a process that counts its allocations; says whether it succeeded."""
    print(f"measuring {name}, {kind}", file=sys.stderr, flush=True)
    settings = [f"--{key}={getattr(options, key)}" for key in (*SETTINGS, "minutes")]
    command = [sys.executable, __file__, f"--worker={kind}", f"--model={name}", f"--out={options.out}", *settings]
    with tempfile.TemporaryDirectory() as folder:
        threads = {"OMP_NUM_THREADS": str(options.threads), "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        environment = os.environ | threads | preloaded(Path(folder))
        if kind == "compiled" and "LD_PRELOAD" not in environment:
            print("skipping torch.compile: what compiled code allocates is seen only by the allocator", file=sys.stderr)
            return False
        return subprocess.run(command, env=environment, check=False).returncode == 0


# -- the child -----------------------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """What a child process does: one model, into its file."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")  # of the peers
    torch.set_num_threads(options.threads)
    until = time.perf_counter() + 60 * options.minutes
    measured = {"threads": options.threads, "only": options.only}
    if options.worker == "compiled":
        from peers.compiled import measure_compiled

        measured |= measure_compiled(options.model, options.scale, options.rounds, until)
        write_json(options.out / f"{options.model}.compile.json", measured)
        return
    from peers.compare import compare

    path = options.out / f"{options.model}.compile.json"
    compiled = json.loads(path.read_text(encoding="utf-8")) if is_current(path, options) else None
    write_json(
        options.out / f"{options.model}.json",
        measured | compare(options.model, options.scale, options.rounds, until, options.only, compiled),
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a file whole or not at all, so that one that is there can be trusted."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
