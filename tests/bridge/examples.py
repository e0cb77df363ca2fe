"""One example of every message, with every field away from its default: what golden bytes hold."""

import numpy as np
from doublure_bridge import (
    CompactSpec,
    Credit,
    Error,
    Frame,
    Heartbeat,
    Hello,
    Message,
    OpenSession,
    Progress,
    Rows,
    SessionOpened,
    SourceChanged,
    Stop,
    Stopped,
    Weights,
    WeightsApplied,
    WeightsRejected,
    Welcome,
    spec_to_dict,
)

SESSION = bytes(range(16))
DIGEST = bytes(range(32))
SCORES = {"psnr_db": 41.5, "relmse": 0.0025, "peak_ratio": 0.97}
ROWS = (np.arange(12, dtype="<f4") / 8).reshape(2, 6)
PIXELS = (np.arange(24, dtype="<f2") / 4).reshape(2, 3, 4)

EXAMPLES: list[Message] = [
    Hello(
        protocol=1, oldest=1, software="doublure 0.1.0", host="wgpu", pid=4711, token=DIGEST,
        capabilities=["rows"],
    ),
    Welcome(
        protocol=1, software="doublure 0.1.0", server=SESSION, pid=4712, heartbeat_ms=500,
        capabilities=["resume"],
    ),
    OpenSession(
        digest=DIGEST, source="plasma", width=512, height=256, parameter_low=0.0,
        parameter_high=10.0, model="grid", config={"batch": 4096}, resume=SESSION,
    ),
    SessionOpened(
        session=SESSION, resume=SESSION[::-1], credit=16, step=120,
        models=[spec_to_dict(CompactSpec())], held_out=[[-0.5, -0.4]], test=[[0.25, 0.5]],
        job_pid=4713,
    ),
    Rows(session=SESSION, sequence=7, t=-0.25, rows=ROWS, age_us=1500),
    Frame(
        session=SESSION, sequence=8, t=0.5, color="linear", origin="bottom-left", pixels=PIXELS,
        checksum=0xDEADBEEF, age_us=2500,
    ),
    Credit(session=SESSION, frames=4),
    Progress(
        session=SESSION, state="training", step=900, seconds=4.5, samples=7_372_800,
        samples_per_s=1.5e6, loss=0.00125, family="grid", version=3, held_out=SCORES, test=SCORES,
        rows=1_000_000, coverage=0.875, detail={"race": ["grid", "compact"]},
    ),
    Weights(
        session=SESSION, version=3, step=900, digest=DIGEST, model=spec_to_dict(CompactSpec()),
        scores=SCORES, tensors=b"safetensors", probe_points=ROWS[:, :3].copy(),
        probe_colors=ROWS[:, 3:].copy(), seconds=4.5,
    ),
    WeightsApplied(session=SESSION, version=3, frame=88, delay_us=900),
    WeightsRejected(session=SESSION, version=3, reason="golden probes differ by 0.5"),
    SourceChanged(session=SESSION, digest=DIGEST, reason="uniform `speed` changed"),
    Stop(session=SESSION, reason="scene stopped"),
    Stopped(session=SESSION, reason="stop", step=901),
    Error(
        session=SESSION, code="config", what="config.batchsize", expected="a known key",
        got="batchsize", next_step="did you mean batch?", detail="Traceback …", fatal=False,
    ),
    Heartbeat(session=SESSION, sequence=12, reply=True),
]  # fmt: skip
