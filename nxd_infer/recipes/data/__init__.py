"""From files to rows: ``sources`` reads, ``encode`` tokenises, ``store`` keeps tokens, ``rows`` makes rows of them."""
