"""What BytePS's examples use of torchvision, small and without a download."""
