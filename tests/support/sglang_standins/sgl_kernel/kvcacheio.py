"""Names of transfers between host and device caches, which SGLang 0.5.12 imports and an engine of these tests never uses."""

from torchvision.absent import function as __getattr__  # noqa: F401
