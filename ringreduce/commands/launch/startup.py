"""Lines that TensorFlow writes in every process as it starts. Pure."""

from __future__ import annotations

import re

# Parts of the texts of TensorFlow 2.18 to 2.21; anything else may be an error that matters.
_STARTUP = re.compile(
    r"^I0000 00:00:\d"  # Information that its C++ code gives before logging is set up.
    r"|All log messages before absl::InitializeLog\(\) is called are written to STDERR"
    r"|oneDNN custom operations are on\."
    r"|Could not find cuda drivers on your machine"
    r"|Unable to register cu(DNN|FFT|BLAS) factory: Attempting to register factory"
    r"|computation placer already registered"
    r"|This TensorFlow binary is optimized to use available CPU instructions"
    r"|^To enable the following instructions: .* rebuild TensorFlow with"
    r"|failed call to cuInit: (INTERNAL: CUDA error: Failed call to cuInit: )?"
    r"(UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE)"
    r"|TF-TRT Warning: Could not find TensorRT"
)


def is_startup_line(line: str) -> bool:
    """Whether it says the same for all ranks, and nothing that a user must act on."""
    return _STARTUP.search(line) is not None
