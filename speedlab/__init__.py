"""Helpers of the workbook on speeding up PyTorch training.

What a lesson teaches stands in its notebook; these modules hold only what would distract there.
"""

import logging

# On a machine with a CUDA toolkit but no GPU this logger warns, in the middle of whichever lesson imports it first.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
