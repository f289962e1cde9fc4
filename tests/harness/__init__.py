"""What several test folders share: tiny engines, scripted models, a byte tokenizer, mutants."""
