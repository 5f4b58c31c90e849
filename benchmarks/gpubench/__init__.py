"""Codecs of device arrays: their bytes against the CPU's, their speed against a copy on the device."""
