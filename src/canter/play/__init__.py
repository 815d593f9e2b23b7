"""What is done with a trained policy: play, evaluation, video, export."""
