import pytest

from tests.proxy.processes import Engine, Proxy


@pytest.fixture(scope="session")
def idle_engines():
    """Engines that outlived their tests unharmed: starting one takes longer than most tests."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def make_engine(cleanup, idle_engines):
    """A stub engine; keywords are its faults."""

    def give_back(engine: Engine) -> None:
        if engine.is_unharmed():
            idle_engines.append(engine)
        else:
            engine.stop()

    def make(**faults) -> Engine:
        engine = idle_engines.pop() if idle_engines else Engine()
        cleanup.callback(give_back, engine)
        if faults:
            engine.control(**faults)
        return engine

    return make


@pytest.fixture
def make_proxy(cleanup):
    """The real command, once the instances given to it are available."""

    def make(*flags: str, prefill=(), decode=(), **options) -> Proxy:
        proxy = Proxy(*flags, prefill=prefill, decode=decode, **options)
        cleanup.callback(proxy.stop)
        return proxy

    return make
