"""The host that demo and tests start: an interrupt before the server answers leaves neither a process nor a folder."""

import pytest

from comfy_host import ComfyHost


def test_an_interrupt_while_the_server_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(host: ComfyHost) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ComfyHost, "_answers", interrupt)
    host = ComfyHost()
    with pytest.raises(KeyboardInterrupt), host:
        pytest.fail("the body must not run")
    assert host._process is not None and host._process.poll() is not None
    assert not host.base.exists()
