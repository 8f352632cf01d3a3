"""Update LoRA adapters as transactions, whichever engine holds them."""
