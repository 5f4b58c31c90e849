"""Codecs of device arrays: the same messages, byte for byte, by the kernels of :file:`kernels/cuda`.

One :class:`~.driver.Driver` for each codec, which says what to launch; :mod:`.messages` is what they share.
"""

from hybridcomp.codecs.device.driver import Driver, driver_of, suffix
from hybridcomp.codecs.device.messages import (
    Encoded,
    add_array,
    convert,
    decode_array,
    decode_opened,
    encode_array,
    encode_into,
    open_message,
    read_opened,
)

__all__ = [
    "Driver",
    "Encoded",
    "add_array",
    "convert",
    "decode_array",
    "decode_opened",
    "driver_of",
    "encode_array",
    "encode_into",
    "open_message",
    "read_opened",
    "suffix",
]
