"""What configs/quickstart_vlm.yaml starts from: drawings of shapes and a small vision-language model that sees them."""
