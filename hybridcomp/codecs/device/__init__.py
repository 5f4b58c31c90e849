"""Codecs of device arrays: the same messages, byte for byte, by the kernels of :file:`kernels/cuda`.

A :class:`~.driver.Driver` for each codec says what to launch; :mod:`.messages` holds the code they share. An object
with the name of a module here is imported from its own module: loading the module of that name would replace it.
"""

from hybridcomp.codecs.device.driver import Driver, driver_of, suffix
from hybridcomp.codecs.device.feedback import MEMORIES, accumulate, encode_with_feedback
from hybridcomp.codecs.device.memory import DeviceMemory
from hybridcomp.codecs.device.messages import (
    Encoded,
    add_array,
    decode_array,
    decode_opened,
    encode_array,
    encode_into,
    open_message,
    read_opened,
)
from hybridcomp.codecs.device.states import Slots

__all__ = [
    "MEMORIES",
    "DeviceMemory",
    "Driver",
    "Encoded",
    "Slots",
    "accumulate",
    "add_array",
    "decode_array",
    "decode_opened",
    "driver_of",
    "encode_array",
    "encode_into",
    "encode_with_feedback",
    "open_message",
    "read_opened",
    "suffix",
]
