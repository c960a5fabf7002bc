"""``python -m bench``: collectives with nccl-tests' flags and columns, and training speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bench import large, sweep
from bench import link as linking
from bench import peers as peering
from bench.collectives import COLLECTIVES
from bench.namespaces import HOSTS_MAX, UnavailableError, bits_per_second
from bench.peers import Pace
from bench.systems import ENTRIES, MEASURED
from ringreduce.vocabulary.config import SETTINGS

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def size_in_bytes(text: str) -> int:
    """`text` such as 1K, 64M, 2G or 100."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        return int(digits) * factor
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no size; 100, 1K, 64M and 2G are") from None


def check_workers(collective: str, workers: int) -> None:
    """Refuse a number of ranks that `collective` cannot have."""
    if COLLECTIVES[collective].in_pairs and workers % 2:
        raise typer.BadParameter(f"{collective} needs an even number of ranks, not {workers}")


Workers = Annotated[int, typer.Option("-n", "--workers", min=1, help="Ranks, all on this host.")]
Begin = Annotated[str, typer.Option("-b", "--begin", help="Smallest size.")]
End = Annotated[str, typer.Option("-e", "--end", help="Largest size.")]
Factor = Annotated[float, typer.Option("-f", "--factor", min=1.01, help="From size to size.")]
Warmup = Annotated[int, typer.Option("-w", "--warmup", min=1, help="Calls before measuring.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write rows here.")]
Dtype = Annotated[str, typer.Option("-d", "--dtype")]
Latency = Annotated[
    float,
    typer.Option(min=0, max=1000, metavar="MS", help="Of the links, each way; packets are held."),
]
Op = Annotated[str, typer.Option("-o", "--op", help="sum, mean, min, max or product.")]
Transport = Annotated[
    str,
    typer.Option(metavar="|".join(SETTINGS["transport"].values), help="How ranks communicate."),
]


def _register(name: str, summary: str) -> None:
    def command(
        workers: Workers = 2,
        begin: Begin = "1K",
        end: End = "64M",
        factor: Factor = 4,
        dtype: Dtype = "float32",
        op: Op = "sum",
        warmup: Warmup = 5,
        transport: Transport = "auto",
        registered: Annotated[
            bool, typer.Option("--registered", help="Buffers of communicator.empty.")
        ] = False,
        json_file: Json = None,
    ) -> None:
        check_workers(name, workers)
        size_range = sweep.sizes(size_in_bytes(begin), size_in_bytes(end), factor)
        code = sweep.run(
            name,
            workers=workers,
            size_range=size_range,
            dtype=dtype,
            op=op,
            warmup=warmup,
            transport=transport,
            registered=registered,
            json_file=json_file,
        )
        raise typer.Exit(code)

    app.command(name, help=summary)(command)


_register("all_reduce", "Time of the sum over all ranks, in place.")
_register("reduce_scatter", "Time of the sum, each rank left with its own chunk.")
_register("all_gather", "Time of joining all ranks' parts; the size is that of the result.")
_register("broadcast", "Time of copying rank 0's buffer to all.")
_register("all_to_all", "Time of sending a part of every buffer to each rank.")
_register("gather", "Time of joining all ranks' parts on rank 0; the size is that of the result.")
_register("scatter", "Time of giving each rank a part of rank 0's buffer.")
_register("sendrecv", "Time of a buffer to the other rank of a pair and one back.")


@app.command()
def peers(
    workers: Workers = 2,
    begin: Begin = "1K",
    end: End = "64M",
    factor: Factor = 4,
    warmup: Warmup = 5,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds at each size.")] = 5,
    collective: Annotated[str, typer.Option(metavar="|".join(MEASURED))] = MEASURED[0],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only this system, such as gloo; may be repeated."),
    ] = None,
    json_file: Json = None,
) -> None:
    """A collective of ringreduce, Gloo, Open MPI and TensorFlow's ring, alternating."""
    if collective not in MEASURED:
        raise typer.BadParameter(f"{collective!r} is not measured; {', '.join(MEASURED)} are")
    labels = [entry.label for entry in ENTRIES]
    if unknown := sorted(set(only or ()) - set(labels)):
        raise typer.BadParameter(f"{unknown[0]!r} is no system; {', '.join(labels)} are")
    check_workers(collective, workers)
    code = peering.run(
        workers=workers,
        size_range=sweep.sizes(size_in_bytes(begin), size_in_bytes(end), factor),
        pace=Pace(rounds=rounds, warmup=warmup),
        labels=only,
        collective=collective,
        json_file=json_file,
    )
    raise typer.Exit(code)


def rate_of(text: str) -> str:
    """`text`, checked to be a rate such as 1gbit."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


@contextlib.contextmanager
def unavailable_is_an_answer() -> Iterator[None]:
    """Within, `UnavailableError` ends the program with one sentence and code 2."""
    try:
        yield
    except UnavailableError as error:
        typer.echo(f"bench: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def link(
    workers: Annotated[
        int, typer.Option("-n", "--workers", min=2, max=HOSTS_MAX, help="Hosts, a rank on each.")
    ] = 4,
    rate: Annotated[str, typer.Option(help="Of each host's link, such as 1gbit.")] = "1gbit",
    latency: Latency = 0,
    begin: Begin = "16M",
    end: End = "64M",
    factor: Factor = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds at each size.")] = 3,
    json_file: Json = None,
) -> None:
    """Share of a slow network's rate that an all-reduce reaches. Needs root."""
    rate = rate_of(rate)
    with unavailable_is_an_answer():
        code = linking.run(
            workers=workers,
            rate=rate,
            latency_ms=latency,
            size_range=sweep.sizes(size_in_bytes(begin), size_in_bytes(end), factor),
            # A call takes most of a second, so fewer are enough.
            pace=Pace(rounds=rounds, calls_min=9, warmup=2),
            json_file=json_file,
        )
    raise typer.Exit(code)


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="mlp, cnn, transformer, or wide: a transformer of 10 M weights.")
    ] = "cnn",
    workers: Annotated[int, typer.Option(min=2, help="Replicas and ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each system.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps in a round.")] = 10,
    ceiling: Annotated[
        bool, typer.Option("--ceiling", help="Also workers that reduce nothing.")
    ] = False,
    jit: Annotated[
        bool, typer.Option("--jit", help="Also with jit_compile=True, where that works.")
    ] = False,
    compression: Annotated[
        str, typer.Option(metavar="NAME,...", help="ringreduce also with these: fp16, bf16, int8.")
    ] = "",
    sharded: Annotated[
        bool, typer.Option("--sharded", help="ringreduce also with a sharded update.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help="sgd, with momentum, or adam.")] = "sgd",
    transport: Transport = "auto",
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="On hosts with links of this rate, such as 1gbit: ringreduce and "
            "MultiWorkerMirroredStrategy. Needs root.",
        ),
    ] = None,
    latency: Latency = 0,
    bucket: Annotated[
        str, typer.Option(metavar="SIZE", help="Gradients that ringreduce reduces at a time.")
    ] = "4M",
    json_file: Json = None,
) -> None:
    """Samples per second of one process, MirroredStrategy and ringreduce, alternating."""
    from bench import train as training

    if latency and not link:
        raise typer.BadParameter("--latency is of the links that --link makes")
    if model not in (known := ("mlp", "cnn", "transformer", "wide")):
        raise typer.BadParameter(f"{model!r} is no model; {', '.join(known)} are")
    with unavailable_is_an_answer():
        training.run(
            model,
            workers=workers,
            rounds=rounds,
            steps=steps,
            transport=transport,
            link=rate_of(link) if link else None,
            latency_ms=latency,
            ceiling=ceiling,
            jit=jit,
            compressions=_chosen(compression, ("fp16", "bf16", "int8")) if compression else (),
            sharded=sharded,
            optimizer=optimizer,
            bucket_bytes=size_in_bytes(bucket),
            json_file=json_file,
        )


@app.command()
def strategies(
    model: Annotated[str, typer.Option(help="Whose speed: mlp, cnn or transformer.")] = "mlp",
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, max=16, help="Ranks.")] = 2,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Each worker on its own host with a link of this rate, such as 1gbit. Needs root.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Turns of each system: 5, or trainings for --accuracy: 1."),
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps in a turn.")] = 10,
    every: Annotated[int, typer.Option(min=2, help="Steps between two meetings.")] = 50,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Instead of speed: seconds until an accuracy.")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", help="Instead of speed: final accuracies, in pairs of N equal seeds."
        ),
    ] = 0,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this system, such as int8; may be repeated."),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="DIR", help="Draw SVGs here.")] = None,
    json_file: Json = None,
) -> None:
    """Fewer bytes, fewer meetings, and a parameter server: speed and accuracy, alternating."""
    from bench.strategies import run as running
    from bench.strategies import seeds as paired
    from bench.strategies.ways import EVERY_STEP, RING_AND_SERVERS, WAYS

    if model not in (known := ("mlp", "cnn", "transformer")):
        raise typer.BadParameter(f"{model!r} is no model; {', '.join(known)} are")
    if unknown := sorted(set(only or ()) - {way.name for way in WAYS}):
        names = ", ".join(way.name for way in WAYS)
        raise typer.BadParameter(f"{unknown[0]!r} is no system; {names} are")
    if seeds == 1 or seeds < 0:
        raise typer.BadParameter(f"{seeds} seeds have no spread; 2 and more have")
    if seeds and only:
        if EVERY_STEP not in only:
            raise typer.BadParameter(f"seeds are compared with {EVERY_STEP}: add it to --only")
        if left := sorted(set(only) - {way.name for way in paired.WAYS}):
            raise typer.BadParameter(f"{left[0]!r} takes no part in --seeds")
    if plot and not accuracy:
        if seeds:
            raise typer.BadParameter("--seeds has nothing to draw")
        compared = set(only or RING_AND_SERVERS) & set(RING_AND_SERVERS)
        if not link or EVERY_STEP not in compared or len(compared) < 2:
            raise typer.BadParameter(f"speed is drawn with --link, {EVERY_STEP} and a server")
    settings = running.Settings(
        names=only,
        workers=workers,
        rate=rate_of(link) if link else None,
        rounds=rounds or (1 if accuracy else 5),
        every=every,
        plot=plot,
        json_file=json_file,
    )
    with unavailable_is_an_answer():
        running.run(settings, model=model, steps=steps, learns=accuracy, seed_count=seeds)


def _chosen(text: str, known: tuple[str, ...]) -> list[str]:
    """Those in `text`, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


@app.command()
def embedding(
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, help="Ranks.")] = 2,
    tables: Annotated[str, typer.Option(metavar="NAME,...")] = "recommender,two,million",
    ids: Annotated[str, typer.Option(metavar="NAME,...")] = "zipf,uniform",
    optimizer: Annotated[str, typer.Option(metavar="NAME,...")] = "adam,sgd",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each system.")] = 6,
    steps: Annotated[int, typer.Option(min=2, help="Steps in a round.")] = 20,
    json_file: Json = None,
) -> None:
    """Samples per second with large tables, whole on each rank or in parts, alternating."""
    large.run(
        "bench.embedding_worker",
        large.EMBEDDING,
        [
            {"tables": name, "ids": drawn, "optimizer": chosen, "workers": workers}
            for name in _chosen(tables, ("recommender", "two", "million"))
            for drawn in _chosen(ids, ("zipf", "uniform"))
            for chosen in _chosen(optimizer, ("adam", "sgd"))
        ],
        batch=256,
        workers=workers,
        rounds=rounds,
        steps=steps,
        json_file=json_file,
    )


@app.command()
def parallel(
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, max=2, help="Ranks.")] = 2,
    widths: Annotated[str, typer.Option(metavar="N,...", help="Of the layers.")] = "512,1024,2048",
    batch: Annotated[int, typer.Option(min=8, help="Global batch.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each system.")] = 6,
    steps: Annotated[int, typer.Option(min=2, help="Steps in a round.")] = 10,
    json_file: Json = None,
) -> None:
    """Samples per second of dense layers, whole on each rank, split, or in stages, alternating."""
    if not all(width.isdigit() and int(width) % workers == 0 for width in widths.split(",")):
        raise typer.BadParameter(f"{widths!r} are no widths that {workers} ranks can divide")
    large.run(
        "bench.parallel_worker",
        large.PARALLEL,
        [{"width": int(width)} for width in widths.split(",")],
        batch=batch,
        workers=workers,
        rounds=rounds,
        steps=steps,
        json_file=json_file,
    )


@app.command()
def fit(
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, help="Ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of three epochs each.")] = 4,
    steps: Annotated[int, typer.Option(min=12, help="Of a long epoch.")] = 300,
    json_file: Json = None,
) -> None:
    """What rr.fit's loop costs beside model.fit of one process, alternating."""
    from bench import fit as fitting

    fitting.run(workers=workers, rounds=rounds, steps=steps, json_file=json_file)


@app.command()
def trial(
    models: Annotated[str, typer.Option("--models", metavar="MODEL,...")] = "",
    workers: Annotated[int, typer.Option("-n", "--workers", min=2, help="Ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each, in new processes.")] = 5,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Each rank on its own host, such as 10gbit. Needs root."),
    ] = None,
    json_file: Json = None,
) -> None:
    """What the trial of a step costs before the first one, beside rr.fit without and model.fit."""
    from bench import trial as trying

    names = models.split(",") if models else list(trying.MODELS)
    if unknown := sorted({*names} - {*trying.MODELS}):
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(trying.MODELS)}")
    rate = rate_of(link) if link else None
    trying.run(models=names, workers=workers, rounds=rounds, link=rate, json_file=json_file)


@app.command()
def exchanges(json_file: Json = None) -> None:
    """How many collectives a training makes beside its steps: around it, and in each epoch."""
    from bench import exchanges as exchanging

    exchanging.run(json_file=json_file)


@app.command()
def simulate(
    workers: Annotated[
        str, typer.Option("-n", "--workers", metavar="N,...", help="Ranks of the rings.")
    ] = "2,3,4,8,16",
    rate: Annotated[str, typer.Option(help="Of each host's link, such as 100mbit.")] = "100mbit",
    seconds: Annotated[float, typer.Option(min=0, help="How long a size is measured.")] = 0.5,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Measure, or take docs/scaling.md's values.")
    ] = True,
    failures: Annotated[float, typer.Option(min=1e-9, help="Of a thousand hosts, a day.")] = 4,
    save: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="For which a checkpoint stops all.")
    ] = 10,
    restart: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="From a failure to the next step.")
    ] = 120,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw an SVG here.")] = None,
    json_file: Json = None,
) -> None:
    """A model of the collectives, checked on slow links, for up to 4,096 ranks. Needs root."""
    from bench.simulate import run as simulating
    from bench.simulate.training import Conditions

    try:
        ranks = sorted({int(number) for number in workers.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{workers!r} are no numbers of ranks; 2,4,8 are") from None
    if ranks[0] < 2 or ranks[-1] > HOSTS_MAX:
        raise typer.BadParameter(f"rings have 2 to {HOSTS_MAX} ranks")
    conditions = Conditions(failures_a_day=failures / 1000, checkpoint_s=save, restart_s=restart)
    code = simulating.run(
        rate=rate_of(rate),
        ranks=ranks,
        seconds=seconds,
        is_checked=check,
        conditions=conditions,
        plot=plot,
        json_file=json_file,
    )
    raise typer.Exit(code)


@app.command()
def report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Take these results first: of peers, train, embedding or strategies --accuracy "
            "with --json, or trace.json of `ringreduce trace`.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of data and figures; docs/figures.")
    ] = None,
) -> None:
    """Draw docs/figures/*.svg from the data beside them."""
    from bench import figures

    folder = into or figures.FOLDER
    for file in files or ():
        try:
            typer.echo(f"taken: {figures.add(file, folder)}")
        except (ValueError, KeyError) as error:
            raise typer.BadParameter(f"{file}: {error}") from None
    drawn = figures.draw(folder)
    if not drawn:
        raise typer.BadParameter(f"{folder} has no data; give results, such as of peers --json")
    typer.echo("\n".join(f"drawn: {file}" for file in drawn))


if __name__ == "__main__":
    app(prog_name="python -m bench")
