"""The program of the parent: check, start the ranks, show their messages, write the results."""

from __future__ import annotations

import json
import os
import signal
import sysconfig
import tempfile
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from typer import echo

from ..errors import RankFailedError, UnsupportedError
from .launch import Message, Ranks
from .networks import networks
from .settings import Settings

OK, FAILED, INTERRUPTED = 0, 1, 130
LINE_EVERY_S = 3.0
SMALLEST_BYTES = 81920
_MARKS = {"kill": "tab:red", "stall": "tab:red", "went on": "tab:orange", "rejoined": "tab:green"}  # of events


def run(settings: Settings) -> int:
    """Run the demo and return the exit code: 0, 1 (a rank failed, or the check did), 130 (interrupted).

    Raises:
        InvalidArgument: the settings cannot run. UnsupportedError: matplotlib is missing, a GPU, or text to learn.
    """
    settings.check()
    if settings.device == "cuda" and num_gpus() == 0:
        raise UnsupportedError("--device cuda needs a GPU, and torch sees none; leave it out to train on CPUs")
    if find_spec("matplotlib") is None:  # an extra: detected before a minute of training, not after
        raise UnsupportedError("the demo's pictures need matplotlib, which is not installed; pip install matplotlib")
    try:
        result = _train(settings)
    except KeyboardInterrupt:
        echo("interrupted; all ranks have ended")
        return INTERRUPTED
    except RankFailedError as exc:
        echo(f"{exc}\n{exc.cause}")
        return FAILED
    _show(result, settings)
    _save(settings, result)
    return OK if result["check"]["passed"] else FAILED


def _train(settings: Settings) -> Message:
    """Start the ranks and return the result; its `events` are in order."""
    # The ranks' program needs torch, which takes a second or two to import: only after the settings were checked.
    from .rank import run_rank

    events: list[Message] = []
    next_line_s = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="epee-demo-") as name,
        networks(settings.num_hosts, Path(name)) as hosts,
        Ranks(run_rank) as ranks,
    ):
        num_bytes = (Path(name) / "text").write_bytes(read_text())
        where = f" on {settings.num_hosts} hosts ({hosts})" if hosts else ""
        where = where or (f" on {min(num_gpus(), settings.num_ranks)} GPU(s)" if settings.device == "cuda" else "")
        echo(f"starting {settings.num_ranks} rank(s){where} to learn {num_bytes / 1e6:.1f} MB of Python's modules ...")
        for rank in range(settings.num_ranks):
            ranks.start(rank, settings, Path(name), is_mortal=rank in settings.victims)
        for message in ranks.messages():
            if message["kind"] == "result":
                result = message
            elif message["kind"] == "event":
                echo(f"{message['seconds']:6.2f} s  {message['text']}")
                events.append(message)
                if message["what"] == "started" and settings.victim is not None:
                    ranks.start(settings.victim, settings, Path(name), True)
                if message["what"] == "rejoined":  # a victim that was only stopped finds its rank taken
                    for stopped in (event for event in events if event["what"] == "stall"):
                        os.kill(stopped["pid"], signal.SIGCONT)
            elif time.monotonic() >= next_line_s:
                _show_step(message, settings)
                next_line_s = time.monotonic() + LINE_EVERY_S
    return {**result, "events": sorted(events, key=lambda event: event["seconds"])}


def num_gpus() -> int:
    """Return how many GPUs torch sees."""
    import torch  # takes a second or two

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def read_text() -> bytes:
    """Return the text to learn: the modules of the running Python's standard library, always in one order.

    Raises:
        UnsupportedError: this Python came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < SMALLEST_BYTES:
        raise UnsupportedError(f"the demo learns from Python's own modules, and {folder} has none; use another Python")
    return text


def links(traffic: list[list[float]]) -> str:
    """Return the bytes of each link between two ranks as text, `0→1 12.3 MB`; a sum if they are many."""
    ranks = range(len(traffic))
    pairs = [(traffic[src][dst] / 1e6, f"{src}→{dst}") for src in ranks for dst in ranks if src != dst]
    if len(pairs) > 6:
        total, (most, link) = sum(count for count, _ in pairs), max(pairs)
        return f"{total:,.1f} MB over {len(pairs)} links, most {link} {most:,.1f} MB"
    return "  ".join(f"{link} {count:,.1f} MB" for count, link in pairs) or "nothing between ranks: there is one"


def between_hosts(network: list[list[float]], traffic: list[list[float]], settings: Settings) -> str:
    """Return the bytes that crossed the network, and the bytes of one copy per rank; nothing on one host."""
    if not network:
        return ""
    ranks, hosts = range(len(traffic)), range(len(network))
    flat = sum(traffic[a][b] for a in ranks for b in ranks if settings.host_of(a) != settings.host_of(b)) / 1e6
    sent = sum(network[a][b] for a in hosts for b in hosts if a != b) / 1e6
    return f"; between {len(network)} hosts {sent:,.1f} MB (once per rank: {flat:,.1f})"


def _show_step(message: Message, settings: Settings) -> None:
    step, seconds, loss, tokens = message["last"]
    sent = links(message["traffic"]) + between_hosts(message["network"], message["traffic"], settings)
    echo(f"step {step:>4}  {seconds:5.1f} s  loss {loss:.3f}  {tokens / seconds:,.0f} tokens/s  sent {sent}")


def _show(result: Message, settings: Settings) -> None:
    """Print traffic, loss, and the check."""
    crossed = between_hosts(result["bytes_between_hosts"], result["bytes_per_link"], settings)
    echo(f"sent {links(result['bytes_per_link'])}{crossed}")
    first, last = (result["steps"][i][2] for i in (0, -1))
    echo(
        f"loss in nats per byte: training {first:.3f} -> {last:.3f}, validation {result['valid']:.3f}; "
        f"{result['tokens']:,} tokens in {len(result['steps'])} steps"
    )
    echo(_verdict(result["check"]))


def _verdict(check: Message) -> str:
    """Return the comparison of one step with a dense process as text."""
    return (
        f"one step through epee against one dense process: max deviation {check['max_deviation']:.1e} (allowed "
        f"{check['tolerance']:.0e}, {check['dtype']})  {'PASS' if check['passed'] else 'FAIL'}"
    )


def _save(settings: Settings, result: Message) -> None:
    """Write the picture and the numbers into the settings' folder."""
    picture, numbers = (Path(settings.out) / name for name in ("demo.png", "demo.json"))
    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(settings, result, picture)
    versions = {
        name: next((found.version for found in metadata.distributions(name=name)), "a source tree, not installed")
        for name in ("epee", "torch")
    }
    numbers.write_text(json.dumps({"settings": vars(settings), "versions": versions, **result}, indent=1))
    echo(f"wrote {picture} and {numbers}")


def _draw(settings: Settings, result: Message, path: Path) -> None:
    """Draw loss, speed, rows per expert and bytes per pair of ranks, with a mark where a rank is lost or replaced."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), dpi=100, layout="constrained")  # separate: neither global state nor a display
    (loss, speed), (load, pairs) = figure.subplots(2, 2)
    _, seconds, losses, tokens = zip(*result["steps"], strict=True)
    loss.plot(seconds, losses, label="training")
    loss.plot(seconds[-1], result["valid"], "o", label=f"validation: {result['valid']:.2f}")
    loss.set(xlabel="seconds of training", ylabel="loss, nats per byte")
    few = max(1, len(seconds) // 40)  # steps over which the speed is averaged
    spans = zip(tokens, tokens[few:], seconds, seconds[few:], strict=False)
    speed.plot(seconds[few:], [(after - before) / (end - begin) for before, after, begin, end in spans])
    speed.set(xlabel="seconds of training", ylabel="tokens per second, all ranks", ylim=(0, None))
    for event in result["events"]:
        if colour := _MARKS.get(event["what"]):
            loss.axvline(event["seconds"], color=colour, linestyle="--", label=event["text"])
            speed.axvline(event["seconds"], color=colour, linestyle="--")
    loss.legend(fontsize=8)
    load.bar(range(settings.num_experts), result["rows_per_expert"])
    load.set(xlabel="expert", ylabel="rows in the last forward, all layers and ranks")
    megabytes = [[num_bytes / 1e6 for num_bytes in row] for row in result["bytes_per_link"]]
    sent = pairs.imshow(megabytes, cmap="Blues", aspect="auto")
    pairs.set(xlabel="to rank", ylabel="from rank", xticks=range(settings.num_ranks), yticks=range(settings.num_ranks))
    figure.colorbar(sent, ax=pairs, label="MB sent")
    title = f"{settings.num_experts} experts on {settings.num_ranks} processes; tokens go to their experts through epee"
    figure.suptitle(f"{title}\n{_verdict(result['check'])}", fontsize=11)
    figure.savefig(path)
