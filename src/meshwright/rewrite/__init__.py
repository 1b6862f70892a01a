"""Find equivalent, cheaper graphs: rules, proofs, search, and fx graphs in and out."""
