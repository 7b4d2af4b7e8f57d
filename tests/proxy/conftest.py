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


@pytest.fixture(scope="session")
def idle_proxies():
    """Proxies without flags and instances."""
    proxies: list[Proxy] = []
    yield proxies
    for proxy in proxies:
        proxy.stop()


@pytest.fixture
def make_proxy(cleanup, idle_proxies):
    """The real command, once the instances given to it are available; without flags it may have served another test."""

    def give_back(proxy: Proxy) -> None:
        proxy.leave()
        idle_proxies.append(proxy)

    def make(*flags: str, prefill=(), decode=(), **options) -> Proxy:
        if flags or options:
            proxy = Proxy(*flags, prefill=prefill, decode=decode, **options)
            cleanup.callback(proxy.stop)
            return proxy
        proxy = idle_proxies.pop() if idle_proxies else Proxy()
        cleanup.callback(give_back, proxy)
        proxy.adopt(prefill, decode)
        return proxy

    return make
