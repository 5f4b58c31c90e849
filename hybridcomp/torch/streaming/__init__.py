"""Train linear layers by gradients that are never formed: streaming batch PCA."""

from hybridcomp.torch.streaming.optimizer import StreamedSGD
from hybridcomp.torch.streaming.streamed import StreamedLayers, stream_linear

__all__ = ["StreamedLayers", "StreamedSGD", "stream_linear"]
