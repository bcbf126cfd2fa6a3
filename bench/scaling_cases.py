"""Which rows a scaling run wants, from 1 to 8 GPUs, and in which jobs they are measured: plain data, nothing is run here.

In:   a command's name, sizes (those of a rehearsal are small). Out: jobs, each with its cases in the order in which their rows come.
Next: scaling.py runs them, scaling_rows.py reads their rows.

Every command plans for 1, 2, 4 and 8 GPUs whatever the host has: a case that needs more GPUs than there are gets a row that says so.
"""

from __future__ import annotations

import dataclasses

COUNTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row to be measured. `facts` tell it from the others of its run and go into its row."""

    run: str
    gpus: int
    facts: dict
    variant: str = ""  # of `mtraining bench ring`; "" for other programs

    @property
    def name(self) -> str:
        words = [f"{key}={value}" for key, value in self.facts.items()]
        return " ".join([self.run, f"gpus={self.gpus}", *words])


@dataclasses.dataclass(frozen=True)
class Job:
    """Cases that one start of a program measures, one after another."""

    program: str  # "ring", "peer" (torch's context parallel) or "train"
    cases: tuple[Case, ...]
    flags: dict
    switches: tuple[str, ...] = ()
    halves_apart: bool = (
        False  # NCCL takes each half of the ranks for another host, sockets between
    )
    virtual: bool = False  # ranks are threads of one process on one GPU
    row_limit_s: float = 60  # longest time without a row, start included

    @property
    def gpus(self) -> int:
        return self.cases[0].gpus


@dataclasses.dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...] = (524288, 1048576)
    dense_lengths: tuple[int, ...] = (262144, 524288)
    links_length: int = 131072
    ring: tuple[tuple[str, object], ...] = (
        ("device", "cuda"),
        ("heads", 16),
        ("kv-heads", 2),
        ("head-dim", 128),
        ("dtype", "bf16"),
    )
    dense_kv_heads: int = 16
    sparse: tuple[tuple[str, object], ...] = (("shape", "typical"),)
    on_gpu: bool = True


REHEARSAL = Sizes(
    lengths=(2048, 4096),
    dense_lengths=(2048,),
    links_length=4096,
    ring=(
        ("device", "cpu"),
        ("heads", 4),
        ("kv-heads", 2),
        ("head-dim", 32),
        ("dtype", "float32"),
    ),
    dense_kv_heads=4,
    sparse=(("density", 0.1),),
    on_gpu=False,
)


def topologies(gpus: int) -> list[str]:
    """One node, then every split into equal nodes of at least two."""
    return [f"1x{gpus}"] + [
        f"{gpus // ranks}x{ranks}" for ranks in COUNTS[::-1] if 1 < ranks < gpus
    ]


def rings_of(topology: str, transfers: bool) -> list[dict]:
    """Variants of a topology. One node: a flat ring and a gather; several: hierarchical, gather or ring inside; prefetch 1..3."""
    nodes, ranks = map(int, topology.split("x"))
    if nodes * ranks == 1:
        return [{"ring": "flat"}]
    if nodes == 1:
        rings = [{"ring": "hierarchical", "inner": "gather", "prefetch-steps": 2}]
        rings += [{"ring": "flat", "prefetch-steps": p} for p in (2, 1, 3)]
        if transfers:
            rings += [
                {**rings[0], "transfers": "peer_copies"},
                {**rings[1], "transfers": "peer_copies"},
            ]
        return rings
    return [
        {"ring": "hierarchical", "inner": inner, "prefetch-steps": p}
        for inner in ("gather", "ring")
        for p in (2, 1, 3)
    ]


def variant_of(ring: dict) -> str:
    return ",".join(f"{key}={value}" for key, value in ring.items())


def ring_job(run: str, gpus: int, facts: dict, rings: list[dict], flags: dict, **more) -> Job:
    cases = tuple(
        Case(
            run,
            gpus,
            {**facts, **{key.replace("-", "_"): value for key, value in ring.items()}},
            variant_of(ring),
        )
        for ring in rings
    )
    return Job("ring", cases, flags, **more)


def switches_of(sizes: Sizes) -> tuple[str, ...]:
    return ("--breakdown", "--any-order") if sizes.on_gpu else ("--breakdown",)


def attention_jobs(sizes: Sizes) -> list[Job]:
    """Sparse rings over every count and topology; one GPU before and after the others; ranks of 8 alone, without transfers."""
    jobs = []
    common = {"stripe": 128, "warm-up": 1, "repeats": 5, **dict(sizes.ring), **dict(sizes.sparse)}
    switches = switches_of(sizes)
    for seq_len in sizes.lengths:
        flags = {**common, "seq-len": seq_len}

        def one_node_of(count, time, seq_len=seq_len, flags=flags):
            facts = {"seq_len": seq_len, "topology": "1x1", **({"time": time} if time > 1 else {})}
            return ring_job(
                "attention", count, facts, rings_of("1x1", False), flags, switches=switches
            )

        jobs.append(one_node_of(1, 1))
        for gpus in COUNTS[1:]:
            for topology in topologies(gpus):
                facts = {"seq_len": seq_len, "topology": topology}
                rings = rings_of(topology, sizes.on_gpu)
                jobs.append(ring_job("attention", gpus, facts, rings, flags, switches=switches))
        jobs.append(one_node_of(1, 2))
        if sizes.on_gpu:
            for topology in topologies(8):
                rings = [ring for ring in rings_of(topology, False) if ring["prefetch-steps"] == 2]
                jobs.append(
                    ring_job(
                        "launches alone",
                        1,
                        {"seq_len": seq_len, "topology": topology},
                        rings,
                        flags,
                        switches=(*switches, "--alone"),
                        virtual=True,
                    )
                )
    return jobs


def dense_jobs(sizes: Sizes) -> list[Job]:
    """Dense rings, torch's context parallel behind each; then the same rings with and without a slow link between two halves."""
    jobs = []
    switches = switches_of(sizes)
    common = {"stripe": 128, "warm-up": 1, "repeats": 2, **dict(sizes.ring)}
    for seq_len in sizes.dense_lengths:
        flags = {**common, "kv-heads": sizes.dense_kv_heads, "density": 1, "seq-len": seq_len}
        for gpus in COUNTS:
            for topology in topologies(gpus):
                facts = {"seq_len": seq_len, "topology": topology}
                rings = [
                    ring for ring in rings_of(topology, False) if ring.get("prefetch-steps", 2) == 2
                ]
                jobs.append(ring_job("dense", gpus, facts, rings, flags, switches=switches))
            if gpus > 1 and sizes.on_gpu:
                peer = {"seq-len": seq_len, "heads": 16, "repeats": 2}
                both = (
                    ("allgather", "alltoall")
                    if seq_len == sizes.dense_lengths[-1]
                    else ("allgather",)
                )
                for rotate in both:
                    facts = {"seq_len": seq_len, "peer": "torch context parallel", "rotate": rotate}
                    jobs.append(
                        Job("peer", (Case("dense", gpus, facts),), {**peer, "rotate": rotate})
                    )
    seq_len = sizes.lengths[0]
    for gpus in COUNTS[1:]:
        topology = f"2x{gpus // 2}"
        rings = [{"ring": "flat"}, {"ring": "hierarchical", "inner": "gather"}]
        if gpus > 2:
            rings.append({"ring": "hierarchical", "inner": "ring"})
        for mask, words in (({"density": 1}, "dense"), (dict(sizes.sparse), "sparse")):
            flags = {**common, **mask, "seq-len": seq_len}
            for slow in (False, True):
                facts = {
                    "seq_len": seq_len,
                    "topology": topology,
                    "computed": words,
                    "between_halves": "sockets" if slow else "as it is",
                }
                jobs.append(
                    ring_job(
                        "slow link",
                        gpus,
                        facts,
                        rings,
                        flags,
                        switches=switches,
                        halves_apart=slow,
                        row_limit_s=90,
                    )
                )
    return jobs


def links_jobs(sizes: Sizes) -> list[Job]:
    """One GPU as 2x4 and 4x2 ranks; what leaves a node is held as long as its bytes would take at a rate."""
    jobs = []
    flags = {"stripe": 128, "warm-up": 1, "repeats": 3, **dict(sizes.ring), **dict(sizes.sparse)}
    flags["seq-len"] = sizes.links_length
    for topology in ("2x4", "4x2"):
        rings = []
        for rate in [0, 100, 50, 25, 10, 5, 2.5] if sizes.on_gpu else [0]:
            held = {"outer-gb-per-s": rate} if sizes.on_gpu else {}
            rings += [{"ring": ring, **held} for ring in ("flat", "hierarchical")]
        facts = {"seq_len": sizes.links_length, "topology": topology}
        jobs.append(
            ring_job("links", 1, facts, rings, flags, switches=switches_of(sizes), virtual=True)
        )
    return jobs


@dataclasses.dataclass(frozen=True)
class TrainCase:
    """Train steps of a shape. `budget_s`: what its steps may take together; layers that do not fit into it are left out and computed."""

    shape: str
    seq_len: int
    density: float  # 1: dense
    budget_s: float
    dp_size: int = 1

    @property
    def facts(self) -> dict:
        facts = {"shape": self.shape, "seq_len": self.seq_len, "density": self.density}
        return {**facts, "dp_size": self.dp_size} if self.dp_size > 1 else facts


TRAIN = (
    TrainCase("3B", 524288, 0.05, 50),
    TrainCase("3B", 524288, 1, 80),
    TrainCase("3B", 1048576, 0.05, 60),
    TrainCase("3B", 1048576, 1, 60),
    TrainCase("8B", 1048576, 0.05, 60),
    TrainCase("8B", 1048576, 1, 60),
    TrainCase("3B", 524288, 0.05, 40, dp_size=2),
    TrainCase("3B", 524288, 0.02, 40),
    TrainCase("3B", 524288, 0.10, 40),
    TrainCase("8B", 524288, 0.05, 60),
)
TRAIN_REHEARSAL = (
    TrainCase("tiny", 1024, 1, 30),
    TrainCase("tiny", 4096, 0.9, 30),
    TrainCase("tiny", 4096, 0.9, 30, dp_size=2),
)


def layers_that_fit(whole: int, step_s: float, steps: int, budget_s: float) -> int:
    """Layers of `whole` whose steps take at most `budget_s`, were a step of all `step_s` long and layers all of it; at least one."""
    if step_s <= 0:
        raise ValueError(f"step_s: expected more than 0, got {step_s}")
    return max(1, min(whole, int(whole * budget_s / (steps * step_s))))


# What is kept and where, the quickest first: a train step takes the first that its memory holds.
KEPT = ("except_attention", "layer")


def memory_choices(layers: int) -> list[dict]:
    """Settings of a train step by speed, as keys of its configuration."""
    shares = [0, layers // 6, layers // 3, layers // 2, (2 * layers) // 3, layers]
    choices = [
        {"train.recompute": kept, "train.offload_layers": count}
        for kept in KEPT
        for count in dict.fromkeys(shares)
    ]
    choices = [{**choice, "parallel.offload_optimizer": "false"} for choice in choices]
    on_host = [
        {**choice, "parallel.offload_optimizer": "true"}
        for choice in choices
        if choice["train.recompute"] == "layer"
    ]
    return choices + on_host
