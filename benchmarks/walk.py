"""What it costs to look into `f` and to walk the graph of a chunk.

Both happen in Python, so they are measured on a layer of some 20 operations, where they
weigh more than on a large one.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.figures import Figure, Part, Setting
from benchmarks.timing import Call, Step, Timed, interleaved
from chunkcheck._torch.captures import borders, observed
from chunkcheck._torch.compat import next_number
from chunkcheck._torch.reach import reach


def measure(setting: Setting) -> Part:
    """Return the share of it in the time of one chunk of a transformer's layer."""
    batch, length = (2, 8) if setting.quick else (16, 64)
    width = 256
    layer = nn.TransformerEncoderLayer(width, 8, 1024, dropout=0, batch_first=True)
    x = torch.randn(batch, length, width, requires_grad=True)
    gradient = torch.randn(batch, length, width)
    first = next_number()
    y = layer(x)
    found = borders([y], [x], first)
    if found is None:
        raise RuntimeError("the graph of the layer has no end where it began")
    steps: dict[str, Timed] = {
        "reach": Call(lambda: reach(layer)),
        "borders": Call(lambda: borders([y], [x], first)),
        "observed": Call(lambda: observed(found.nodes, [x])),
        "forward": Call(lambda: layer(x)),  # which builds the graph
        "step": Step(layer, x, gradient, tuple(layer.parameters())),
    }
    setting.say("graph walk: one chunk of a transformer's layer")
    times = interleaved(steps, rounds=3 if setting.quick else 50, budget=15)
    # Each chunk's graph is walked in forward and again in recompute; the rest is done
    # once in a call.
    chunk = ["step", "forward"]
    share = times.ratio(["reach", "observed", "borders", "borders"], chunk)
    further = times.ratio(["borders", "borders"], chunk)
    figure = Figure(
        "walk",
        f"looking into f, walking the graph of {len(found.nodes)} nodes",
        share,
        "share",
        limit=0.05,
        note=f"of the first chunk; of each further one {further:.1%}",
    )
    title = "Graph walk, nn.TransformerEncoderLayer(256, 8, 1024)"
    details = {"seconds per round": times.seconds}
    return Part("walk", title, [figure], (), details)
