"""What a mask is, True where a row sees a key: its band, documents, blocks and padding; its name; its packed form."""
