from torchvision.absent import InterpolationMode  # noqa: F401
from torchvision.absent import function as __getattr__  # noqa: F401
