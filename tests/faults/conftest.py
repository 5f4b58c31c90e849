from tests.net.conftest import namespaces

__all__ = ["namespaces"]
