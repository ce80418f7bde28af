"""What a parameter, or a tensor, is to user code while its values lie elsewhere or in parts."""
