"""Horovod's PyTorch API: ``import zeromesh.horovod as hvd`` in place of ``import horovod.torch as hvd``.

See docs/horovod.md for each name, and what differs. Each module lists its public names.
"""

from zeromesh.horovod import elastic as elastic
from zeromesh.horovod.batch_norm import *  # noqa: F403
from zeromesh.horovod.distributed_optimizer import *  # noqa: F403
from zeromesh.horovod.functions import *  # noqa: F403
from zeromesh.horovod.horovod_start import *  # noqa: F403
from zeromesh.horovod.operations import *  # noqa: F403
from zeromesh.horovod.sets import *  # noqa: F403
from zeromesh.horovod.world import HorovodInternalError as HorovodInternalError
