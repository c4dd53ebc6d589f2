"""What keeps low precision sound: the fp16 loss scale."""
