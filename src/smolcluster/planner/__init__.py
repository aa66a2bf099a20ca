"""What a step would cost on these machines: memory, bytes, which strategies fit. Nothing is trained here."""
