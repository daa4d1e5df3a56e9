"""Server role: owns slots of the key space, and reduces what workers push to them."""
