"""Every tensor of the published layouts fits the modules, by name and shape; nothing is left over on either side."""

from pathlib import Path

import pytest

from mgpu_runtime.models.audio_vae import AudioVAEBuilder
from mgpu_runtime.models.builder import ComponentBuilder
from mgpu_runtime.models.connectors import ConnectorsBuilder
from mgpu_runtime.models.transformer_builder import TransformerBuilder
from mgpu_runtime.models.video_vae import VideoVAEBuilder
from mgpu_runtime.models.vocoder import VocoderBuilder
from mgpu_runtime.weights.registry import StateDictRegistry
from tests.weights_files import published

COUNTS = {
    ("20", TransformerBuilder): 3510,
    ("20", ConnectorsBuilder): 59,
    ("20", VideoVAEBuilder): 184,
    ("20", AudioVAEBuilder): 102,
    ("20", VocoderBuilder): 194,
    ("23", TransformerBuilder): 4186,
    ("23", ConnectorsBuilder): 262,
    ("23", VideoVAEBuilder): 170,
    ("23", AudioVAEBuilder): 102,
    ("23", VocoderBuilder): 1227,
    ("25", TransformerBuilder): 4091,
    ("25", ConnectorsBuilder): 262,
}


@pytest.mark.parametrize(("version", "builder"), COUNTS)
def test_b75_published_layouts_load_strictly(tmp_path: Path, version: str, builder: type[ComponentBuilder]) -> None:
    path = published(version, tmp_path)
    registry = StateDictRegistry()
    module = builder(path, registry=registry).check()
    expected = COUNTS[version, builder]
    assert len(module.state_dict()) == expected
    file = registry.checkpoint(path)
    assert len(file.component(builder.component)) == expected
    assert file.unclaimed == ()
    assert sum(len(names) for names in file.components.values()) == len(file.files[0].keys)
    assert registry.files_read == 0  # names and shapes only
