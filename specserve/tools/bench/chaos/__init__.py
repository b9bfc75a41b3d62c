"""`specserve bench --chaos`: processes of a server die at random times under load, and every client's text is held against the unfailed one."""
