"""The torch backend: cut, loop, checkpoint and join for `torch.Tensor` leaves.

Imported when the first tensor is seen, since it imports torch.
"""

from chunkcheck._torch.measure import decide as decide
from chunkcheck._torch.run import run as run
from chunkcheck._torch.run import untraced as untraced
from chunkcheck._torch.tensors import is_tensor as is_tensor
from chunkcheck._torch.tensors import refusal as refusal
from chunkcheck._torch.tensors import shape as shape
