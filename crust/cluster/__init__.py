"""Many nodes with local pools behind one controller: announcements, requests, leadership."""
