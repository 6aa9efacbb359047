"""Process groups, megatron-core on a CPU, context parallelism. What core announces while it is imported is filtered here.

Core tells of every library it can do without, at every start and on every rank; the `backend` settings of a job say which
ones it uses, and a missing one is an error.
"""

import logging
import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
