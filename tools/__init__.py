"The site builder: notebooks in, pages out. Start reading at `site.py`."
