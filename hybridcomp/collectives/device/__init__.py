"""Operations on arrays in a device's memory: streams, staging, and what MPI can do with their addresses."""
