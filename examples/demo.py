"""Train the digits by Keras, MirroredStrategy, `rr.fit` alone, and two workers on a ring.

``make demo`` runs this. Each way trains digits.py's model on the same data in the same
order with the same global batch; the table at the end compares them. A second table compares
one process with two workers that have parts of a recommender's tables.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
WAYS = (
    ("Keras, one process", [str(HERE / "digits_mirrored.py"), "--replicas", "1"]),
    ("MirroredStrategy, 2 CPUs", [str(HERE / "digits_mirrored.py")]),
    ("ringreduce, one process", [str(HERE / "digits.py")]),
    ("ringreduce, 2 workers", ["-m", "ringreduce", "run", "-n", "2", str(HERE / "digits.py")]),
)
RECOMMENDER = str(HERE / "recommender.py")
PARTS = (
    ("one process", [RECOMMENDER]),
    ("ringreduce, 2 workers", ["-m", "ringreduce", "run", "-n", "2", RECOMMENDER]),
)
RECOMMENDER_EPOCHS = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128, help="over all workers together")
    arguments = parser.parse_args()
    console = Console()
    results, weights = [], []
    with tempfile.TemporaryDirectory() as folder, progress_bar(console) as progress:
        for index, (name, command) in enumerate(WAYS):
            json_file = Path(folder, f"{index}.json")
            weights_file = Path(folder, f"{index}.npz")
            options = ["--batch-size", str(arguments.batch_size), "--save-weights", weights_file]
            results.append(trained(name, command, arguments.epochs, json_file, progress, options))
            with np.load(weights_file) as arrays:
                weights.append([arrays[key] for key in arrays.files])
        parts = [
            trained(name, command, RECOMMENDER_EPOCHS, Path(folder, "parts.json"), progress)
            for name, command in PARTS
        ]
    console.print(comparison(results, weights))
    digests = results[-1]["weights_sha256"]
    same = "equal" if len(set(digests)) == 1 else "DIFFERENT"
    console.print(
        "Where two workers are slower than ringreduce in one process, more do not pay: it uses all "
        "cores already (README)."
    )
    console.print(f"The ring's workers ended with {same} weights, SHA-256 {digests[0][:16]}...")
    console.print(table_of_parts(parts))
    sys.exit(len(set(digests)) != 1)


def progress_bar(console):
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        console=console,
    )


def trained(name, command, epochs, json_file, progress, options=()):
    """The result that a program writes; its bar moves with its epochs."""
    task = progress.add_task(name, total=epochs)
    every = ["--epochs", epochs, "--json", json_file, *options]
    run([sys.executable, *command, *map(str, every)], lambda: progress.advance(task))
    return json.loads(json_file.read_text())


def run(command, advance):
    """Run `command`; call `advance` for every epoch it finishes, show its output if it fails."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **quiet},
    )
    last_lines = deque(maxlen=40)
    for line in process.stdout:
        last_lines.append(line)
        if "/step - " in line:
            advance()
    if process.wait() != 0:
        sys.stderr.writelines(last_lines)
        sys.exit(f"{' '.join(command)} failed with exit code {process.returncode}")


def comparison(results, weights):
    table = Table(title="Handwritten digits, equal global batch", title_justify="left")
    table.add_column("system", no_wrap=True)
    columns = (
        "samples\nper s",
        "x Keras",
        "test\naccuracy",
        "final\nloss",
        "weights\ndiffer by",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for (name, _), result, own in zip(WAYS, results, weights, strict=True):
        difference = max(np.abs(a - b).max() for a, b in zip(own, weights[0], strict=True))
        table.add_row(
            name,
            f"{result['samples_per_s']:,.0f}",
            f"{result['samples_per_s'] / results[0]['samples_per_s']:.2f}",
            f"{result['accuracy']:.4f}",
            f"{result['loss']:.5f}",
            "" if own is weights[0] else f"{difference:.1e}",
        )
    return table


def table_of_parts(results):
    title = "Recommender, 80,000 rows of 50, equal global batch"
    table = Table(title=title, title_justify="left")
    for column in ("system", "samples\nper s", "x one\nprocess", "rows on\neach worker"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for (name, _), result in zip(PARTS, results, strict=True):
        speed = result["samples_per_s"]
        ratio = speed / results[0]["samples_per_s"]
        table.add_row(name, f"{speed:,.0f}", f"{ratio:.2f}", f"{sum(result['rows']):,}")
    return table


if __name__ == "__main__":
    main()
