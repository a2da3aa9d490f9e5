"""Helpers of the workbook on speeding up PyTorch training.

What a lesson teaches is in its notebook; these modules hold only what would distract there.
"""

import logging
import warnings

# On a machine with a CUDA toolkit but no GPU, this logger warns in whichever lesson first imports its module.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# On Python 3.13.0 torch.compile warns of slower guards, in the middle of whichever lesson compiles first.
warnings.filterwarnings("ignore", message=r"Guards may run slower on Python 3\.13\.0")
