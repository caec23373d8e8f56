"""What the server that ranks are forked from imports once, so that no rank spends seconds on it.

None of these may start a thread: a fork would not have it.
"""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo.backends.common  # noqa: F401
import torch._functorch.aot_autograd  # noqa: F401
import torch._inductor.debug  # noqa: F401
import torch._inductor.pattern_matcher  # noqa: F401
import torch.distributed.tensor.experimental._func_map  # noqa: F401
import torch.testing._internal.optests  # noqa: F401

import mgpu_runtime.exchange.context_parallel  # noqa: F401
import mgpu_runtime.exchange.ops  # noqa: F401
import mgpu_runtime.exchange.shared_memory  # noqa: F401
import mgpu_runtime.pipeline.models  # noqa: F401
import tests.tiny  # noqa: F401
