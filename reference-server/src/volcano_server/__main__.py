from volcano_server.cli import main

main()
