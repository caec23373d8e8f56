"""A pack without nodes: its prestartup script lets ComfyUI's own audio nodes load on a test host without torchaudio."""

NODE_CLASS_MAPPINGS: dict[str, type] = {}
