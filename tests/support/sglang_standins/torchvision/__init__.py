"""Names of torchvision that SGLang imports and, for text models, never uses."""

__version__ = "0.0.0+standin"
