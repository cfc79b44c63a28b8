"""Transformers whose text flows through the blocks beside the image: what families of them share. No family itself."""
