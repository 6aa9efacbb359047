"""Post-training of small language models: SFT, reward models, RL, search agents. See README.md.

What megatron-core and torch announce while they are imported is filtered here, before either is: core tells of every
library it can do without, on every rank. The `backend` settings of a job say which ones it uses; a missing one is an error.
"""

import logging
import warnings

warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
