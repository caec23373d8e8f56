"""What sequence parallelism refuses, as checks that need no model: the server runs them before any weight is loaded."""


def check_heads(num_heads: int, world_size: int) -> None:
    """Raises ValueError, naming the worker counts that work, when heads cannot be dealt evenly to the workers."""
    if num_heads % world_size:
        allowed = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"{num_heads} attention heads cannot be split over {world_size} workers; this model runs on {allowed}. "
            "Choose one of these counts in the devices field of Load LTX MGPU."
        )


def check_tokens(num_tokens: int, max_tokens: int) -> None:
    """Raises ValueError with advice when a sequence is longer than the limit chosen at load."""
    if num_tokens > max_tokens:
        raise ValueError(
            f"{num_tokens} video tokens exceed sp_max_tokens {max_tokens}: use fewer frames or a smaller size, or "
            "raise sp_max_tokens in Load LTX MGPU."
        )
