"""Which lines of TensorFlow are not repeated for every rank."""

from __future__ import annotations

from ringreduce.commands.launch.display import STARTUP

LOG = "I0000 00:00:1795379367.218074    9398 "


def test_what_every_process_says_as_it_starts() -> None:
    lines = [
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        LOG + "port.cc:153] oneDNN custom operations are on. You may see slightly different",
        "2026-01-01 10:00:00.1: I tensorflow/core/util/port.cc:153] oneDNN custom operations are "
        "on. You may see",
        LOG
        + "cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be used.",
        "2025-01-01 10:00:00.1: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] "
        "Unable to register cuFFT factory: Attempting to register factory for plugin cuFFT when "
        "one has already been registered",
        LOG + "cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU "
        "instructions in performance-critical operations.",
        LOG + "generator_dataset_op.cc:213] Memory patch applied: M_TRIM_THRESHOLD=128 kb was set.",
        "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow "
        "with the appropriate compiler flags.",
        "E0000 00:00:1.5 9398 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: "
        "Failed call to cuInit: UNKNOWN ERROR (303)",
    ]
    assert [line for line in lines if not STARTUP.search(line)] == []


def test_what_matters_is_none_of_them() -> None:
    lines = [
        "",
        "E0000 00:00:1.5 9398 cuda_dnn.cc:52] Could not create cudnn handle",
        "failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "W0000 00:00:1.5 9482 op_kernel.cc:1845] UNKNOWN: RuntimeError: no file",
        "I1122 10:00:00.000000 140 train.py:12] epoch 1",
        "ValueError: To enable the following instructions",
    ]
    assert [line for line in lines if STARTUP.search(line)] == []
