"""The searcher process: generates responses with a recent policy, scores them and uploads shards."""
