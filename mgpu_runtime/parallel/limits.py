"""What sequence parallelism refuses, as checks that need no model: the server runs them before any weight is loaded."""


def check_heads(num_heads: int, world_size: int) -> None:
    """Raises ValueError, naming the worker counts that work, when there are more workers than heads to deal."""
    if world_size > num_heads:
        raise ValueError(
            f"{num_heads} attention heads cannot be dealt to {world_size} workers, each needs one; this model runs on "
            f"1 to {num_heads}. Choose one of these counts in the devices field of Load LTX MGPU."
        )


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raises ValueError with advice when a sequence is longer than the limit chosen at load."""
    if num_tokens > max_tokens:
        raise ValueError(
            f"{num_tokens} video tokens exceed sp_max_tokens {max_tokens}: use fewer frames or a smaller size, or "
            "raise sp_max_tokens in Load LTX MGPU."
        )
