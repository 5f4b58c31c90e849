"""Operations on arrays in a device's memory: streams, staging, and the MPI calls that take their addresses."""
