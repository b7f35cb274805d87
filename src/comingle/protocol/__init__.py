"""What passes between users and the server: messages, and the one door through which they go."""
